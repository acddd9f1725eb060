"""The graph device of machines without a GPU: a recorder, and memory at fixed addresses."""
