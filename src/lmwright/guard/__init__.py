"""Guards: credentials, control characters and foreign files, kept where they do no harm."""
