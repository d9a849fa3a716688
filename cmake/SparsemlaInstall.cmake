# Install rules and the exported package: find_package(sparsemla), target sparsemla::sparsemla.
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/sparsemla)
install(TARGETS sparsemla EXPORT sparsemla-targets)
install(DIRECTORY include/sparsemla DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(EXPORT sparsemla-targets NAMESPACE sparsemla:: DESTINATION ${package_dir})
if(SPARSEMLA_TOOLS)
    file(RELATIVE_PATH lib_from_bin ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
    set_target_properties(sparsemla_tool PROPERTIES INSTALL_RPATH $ORIGIN/${lib_from_bin})
    install(TARGETS sparsemla_tool)
endif()

# A static library leaves it to the consumer to link what it uses.
set(SPARSEMLA_STATIC TRUE)
if(BUILD_SHARED_LIBS)
    set(SPARSEMLA_STATIC FALSE)
endif()
configure_package_config_file(cmake/sparsemla-config.cmake.in ${PROJECT_BINARY_DIR}/sparsemla-config.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/sparsemla-config-version.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/sparsemla-config.cmake ${PROJECT_BINARY_DIR}/sparsemla-config-version.cmake
        DESTINATION ${package_dir})
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
