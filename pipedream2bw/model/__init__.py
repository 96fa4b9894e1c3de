"""A user's module: cloned, converted, refused, loaded."""
