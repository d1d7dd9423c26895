"""Text: documents normalized and deduplicated, conversations rendered."""
