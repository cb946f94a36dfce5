"""Virtual federations: the Ray engine, presets, reports and figures."""
