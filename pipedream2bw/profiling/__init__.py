"""What a model's layers take on a device, measured or worked out."""
