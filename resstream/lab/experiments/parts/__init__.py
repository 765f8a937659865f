"""What experiments share: claims and outcomes, slopes, races between nets, and what is measured in several of them."""
