"""The benchmark of the rollout driver, compared with other kits' drivers and with bare loops over the same dialogs."""
