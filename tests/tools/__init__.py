"""The tools that tests share: references, models, and ways to run things."""
