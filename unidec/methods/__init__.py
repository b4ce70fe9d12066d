"""Methods of single papers, one file each; `unidec.methods.assembly` chooses those that a recipe
names.
"""
