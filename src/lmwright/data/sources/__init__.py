"""Sources: files of any format to rows of documents."""
