# Installs headers, libraries and a CMake package:
#
#   find_package(minifloat REQUIRED)                     minifloat::minifloat
#   find_package(minifloat REQUIRED COMPONENTS torch)    and minifloat::torch

include(CMakePackageConfigHelpers)
set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/minifloat")

install(DIRECTORY include/minifloat DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
if(TARGET minifloat)
  install(TARGETS minifloat EXPORT minifloatTargets
          LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")
  install(EXPORT minifloatTargets NAMESPACE minifloat:: DESTINATION "${package_dir}")
endif()
if(TARGET minifloat_torch)
  install(TARGETS minifloat_torch EXPORT minifloatTorchTargets
          LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")
  install(EXPORT minifloatTorchTargets NAMESPACE minifloat:: DESTINATION "${package_dir}"
          FILE "minifloatTorchTargets-${TorchCpu_VERSION_MAJOR_MINOR}.cmake")
endif()

configure_package_config_file(cmake/minifloatConfig.cmake.in minifloatConfig.cmake
                              INSTALL_DESTINATION "${package_dir}")
write_basic_package_version_file(minifloatConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/minifloatConfig.cmake"
              "${PROJECT_BINARY_DIR}/minifloatConfigVersion.cmake" cmake/FindTorchCpu.cmake
        DESTINATION "${package_dir}")
