"""MLflow: tracking of runs, the model registry, promotion and lineage; mlflow is imported on use
only.
"""
