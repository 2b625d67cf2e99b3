# Installation: headers, both libraries, the program, man pages, kv8.pc and the CMake package kv8
# with the targets kv8::kv8 (shared) and kv8::kv8_static.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/kv8)
set_target_properties(kv8_shared PROPERTIES EXPORT_NAME kv8)
foreach(library kv8_shared kv8_static)
  target_include_directories(${library} INTERFACE $<INSTALL_INTERFACE:include>)
endforeach()
# What a program linked with libkv8.a needs besides; kv8Config.cmake finds the PkgConfig:: ones.
target_link_libraries(kv8_static INTERFACE
  $<INSTALL_INTERFACE:PkgConfig::KV8_JANSSON> $<INSTALL_INTERFACE:PkgConfig::KV8_PCRE2>
  $<INSTALL_INTERFACE:PkgConfig::KV8_XXHASH> $<INSTALL_INTERFACE:pthreadpool>
  $<INSTALL_INTERFACE:cpuinfo> $<INSTALL_INTERFACE:Threads::Threads> $<INSTALL_INTERFACE:m>)

install(TARGETS kv8_shared kv8_static EXPORT kv8Targets
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
configure_file(cmake/kv8.pc.in generated/kv8.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/generated/kv8.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
