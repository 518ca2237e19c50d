"""From files to parameters: safetensors, configuration, names, presets."""
