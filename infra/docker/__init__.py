"""The images: what they are built from, how they are built, and a trial of them."""
