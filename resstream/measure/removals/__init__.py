"""What is left when parts go: removals, orders of what runs, and the arithmetic of subsets."""
