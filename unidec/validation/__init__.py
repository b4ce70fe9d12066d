"""Great Expectations: is the data fit to train on?"""
