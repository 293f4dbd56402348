"""Plans what a training step will need and cost on a cluster, from its trace, without devices."""
