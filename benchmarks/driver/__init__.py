"""The benchmark of the rollout driver, beside other kits' drivers and bare loops of the same dialogs."""
