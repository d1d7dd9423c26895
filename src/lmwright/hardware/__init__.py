"""Hardware: chips, slices of them, and what joins them."""
