"""What is computed: families, layers, paged attention, weights and sampling."""
