"""A bundle's parts for other programs: label vectors, the query encoder as ONNX, as a sentence-transformers folder."""
