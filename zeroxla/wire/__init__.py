"""How a leaf or a gradient travels: encodings, hops, and the collectives made of them."""
