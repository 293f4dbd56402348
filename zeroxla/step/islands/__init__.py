"""Islands: groups of devices that train on their own and exchange what they have learned."""
