from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyJaxmp(PythonPackage):
    """Distributed matrix multiplication for JAX: a primitive over cuBLASMp, and its calls on CPUs."""

    # A checkout: spack develop --path <checkout> py-jaxmp@0.3.0
    import_modules = ["jaxmp"]

    license("Apache-2.0")

    version("0.3.0")

    depends_on("cxx", type="build")
    depends_on("cmake@3.24:", type="build")
    depends_on("ninja", type="build")
    depends_on("py-scikit-build-core@0.11:", type="build")
    depends_on("py-nanobind@2.9:", type="build")

    with default_args(type=("build", "run")):
        depends_on("python@3.11:")
        depends_on("py-jax@0.10.2:")
        depends_on("py-jaxlib@0.10.2:")
        depends_on("py-numpy")
        depends_on("py-opt-einsum")
    depends_on("openblas", type=("link", "run"))

    requires("platform=linux")

    def patch(self):
        # Spack's OpenBLAS serves.
        filter_file(', "scipy-openblas32"', "", "pyproject.toml", string=True)

    def setup_run_environment(self, env):
        env.set("JAXMP_BLAS", self.spec["openblas"].libs[0])
