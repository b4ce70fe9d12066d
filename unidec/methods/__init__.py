"""Methods of single papers, a file each; `unidec.methods.assembly` chooses those that a recipe
names.
"""
