"""Building blocks shared by the architectures: plain nn.Modules, no architecture names inside."""
