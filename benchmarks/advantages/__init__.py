"""The benchmark of group-relative advantages, compared with other kits."""
