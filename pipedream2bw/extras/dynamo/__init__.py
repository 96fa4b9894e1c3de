"""``torch.compile(model, backend="pipedream2bw")``: forwards without gradients, over stages."""

CALLED = "torch.compile(backend='pipedream2bw')"
"""How errors and warnings name it."""
