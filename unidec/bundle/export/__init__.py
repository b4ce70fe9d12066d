"""Exports of a bundle for other programs: label vectors, and query encoders for ONNX and
sentence-transformers.
"""
