"""Programs that run in other environments: started by path, never imported."""
