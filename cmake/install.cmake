# Installation: headers, the libraries, the program, man pages, kv8.pc and kv8_engine.pc, and the
# CMake package kv8 with the targets kv8::kv8, kv8::kv8_engine (shared) and kv8::<name>_static.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/kv8)
set(libraries kv8_shared kv8_static kv8_engine_shared kv8_engine_static)
foreach(library ${libraries})
  target_include_directories(${library} INTERFACE $<INSTALL_INTERFACE:include>)
endforeach()
set_target_properties(kv8_shared PROPERTIES EXPORT_NAME kv8)
set_target_properties(kv8_engine_shared PROPERTIES EXPORT_NAME kv8_engine)
# What a program linked with the static libraries needs besides; kv8Config.cmake finds it.
target_link_libraries(kv8_static INTERFACE
  $<INSTALL_INTERFACE:kv8::xxhash> $<INSTALL_INTERFACE:Threads::Threads> $<INSTALL_INTERFACE:m>)
target_link_libraries(kv8_engine_static INTERFACE
  $<INSTALL_INTERFACE:kv8::jansson> $<INSTALL_INTERFACE:kv8::pcre2>)

install(TARGETS ${libraries} EXPORT kv8Targets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(TARGET kv8)
  install(TARGETS kv8 RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
install(DIRECTORY include/kv8 DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN *.h)
file(GLOB man_pages CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/man/*.1)
install(FILES ${man_pages} DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)

install(EXPORT kv8Targets NAMESPACE kv8:: DESTINATION ${package_dir})
configure_package_config_file(cmake/kv8Config.cmake.in ${CMAKE_BINARY_DIR}/generated/kv8Config.cmake
  INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/generated/kv8ConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/generated/kv8Config.cmake
  ${CMAKE_BINARY_DIR}/generated/kv8ConfigVersion.cmake DESTINATION ${package_dir})

# The .pc file finds its prefix from where it lies, so that `cmake --install --prefix` and DESTDIR
# need no second configuration.
file(RELATIVE_PATH KV8_PC_TO_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
foreach(library kv8 kv8_engine)
  configure_file(cmake/${library}.pc.in generated/${library}.pc @ONLY)
  install(FILES ${CMAKE_BINARY_DIR}/generated/${library}.pc
    DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endforeach()
