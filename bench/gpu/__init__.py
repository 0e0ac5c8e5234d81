"""What a GPU gives: texts, images, sharing, scale."""
