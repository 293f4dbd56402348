"""What tests share: references, models, ways to run things."""
