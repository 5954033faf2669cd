"""What the API answers, as models: they are the document, and tests hold every answer to them."""
