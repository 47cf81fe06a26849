"""The Hydra plugin: it adds the configs to the search path, and defines their resolvers.

The folder `plugin` is installed beside the package, since Hydra finds plugins in the namespace
package `hydra_plugins`.
"""
