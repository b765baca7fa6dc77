"""The parts of `agentrl.engines.transformers`, the embedded engine: one idea per file."""
