"""The arithmetic of paths by length: how many there are, and what is said of them."""
