"""Operations: the only place in the library that imports mlflow, great_expectations or fastapi, each in use only."""
