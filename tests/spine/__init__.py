"""Which of the product's lines a training passes, and whether docs/spine.txt lists their files."""
