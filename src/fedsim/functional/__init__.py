"""Pure functions: tensors in, tensors out, one equation each."""
