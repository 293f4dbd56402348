"""Updates that multiply whole matrices: each matrix is computed by one device, its owner.

`matrix_pieces` finds the products in the traced update and cuts out the pieces around them.
`layers` cuts a piece of stacked matrices into its layers. `groups` joins equal pieces and gives
each matrix an owner. `travel` brings the matrices to their owners and the results back, and
`owned_update` runs the whole update.
"""
