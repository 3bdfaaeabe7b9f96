"""What a run starts from: a model by name, requests from prompts, a stage by name."""
