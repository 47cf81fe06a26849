"""What Hydra needs of this plugin: the search path of its configs, and their resolvers.

The folder `plugin` is what an installation puts beside the package, since Hydra finds plugins in
the namespace package `hydra_plugins`.
"""
