"""``torch.compile(model, backend="pipedream2bw")``: forwards without gradients, over stages."""
