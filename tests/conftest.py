"""Its being here puts tests/ on the import path, so that tests share helper modules."""
