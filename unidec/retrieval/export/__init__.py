"""A bundle's parts for other programs: label vectors, and the query encoder as ONNX."""
