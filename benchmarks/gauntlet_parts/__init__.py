"""The gauntlet's parts: models, the checks that each must pass, and how results are written."""
