"""What patching measures share: pairs of prompts, grids of cells, their rows, and effects."""
