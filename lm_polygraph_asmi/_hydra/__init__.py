"""The Hydra plugin: search path of the configs, and their resolvers.

The folder `plugin` is installed beside the package, because Hydra finds plugins in the namespace
package `hydra_plugins`.
"""
