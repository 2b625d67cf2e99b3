# Installation: headers, the libraries, the program, man pages, kv8.pc and kv8_engine.pc, and the
# CMake package kv8 with the targets kv8::kv8, kv8::kv8_engine (shared) and kv8::<name>_static. Without
# KV8_ENGINE what belongs to libkv8 alone.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/kv8)
set(installed "")
foreach(library ${libraries}) # kv8 and, with KV8_ENGINE, kv8_engine
  list(APPEND installed ${library}_shared ${library}_static)
  set_target_properties(${library}_shared PROPERTIES EXPORT_NAME ${library})
endforeach()
foreach(library ${installed})
  target_include_directories(${library} INTERFACE $<INSTALL_INTERFACE:include>)
endforeach()
# What a program linked with the static libraries needs besides; kv8Config.cmake finds it.
target_link_libraries(kv8_static INTERFACE
  $<INSTALL_INTERFACE:kv8::xxhash> $<INSTALL_INTERFACE:-pthread> $<INSTALL_INTERFACE:m>)
if(KV8_ENGINE)
  target_link_libraries(kv8_engine_static INTERFACE
    $<INSTALL_INTERFACE:kv8::jansson> $<INSTALL_INTERFACE:kv8::pcre2>)
endif()

install(TARGETS ${installed} EXPORT kv8Targets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(KV8_APPS)
  install(TARGETS kv8 RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  file(GLOB man_pages CONFIGURE_DEPENDS ${kv8_SOURCE_DIR}/man/*.1)
  install(FILES ${man_pages} DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
endif()
# kv8.h names the headers of libkv8; the others are libkv8_engine's.
if(KV8_ENGINE)
  file(GLOB headers CONFIGURE_DEPENDS include/kv8/*.h)
else()
  file(STRINGS include/kv8/kv8.h headers REGEX "^#include <kv8/")
  list(TRANSFORM headers REPLACE "^#include <(.*)>.*" "include/\\1")
  list(APPEND headers include/kv8/kv8.h)
endif()
install(FILES ${headers} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/kv8)

install(EXPORT kv8Targets NAMESPACE kv8:: DESTINATION ${package_dir})
configure_package_config_file(cmake/kv8Config.cmake.in ${kv8_BINARY_DIR}/generated/kv8Config.cmake
  INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${kv8_BINARY_DIR}/generated/kv8ConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES cmake/find_libraries.cmake ${kv8_BINARY_DIR}/generated/kv8Config.cmake
  ${kv8_BINARY_DIR}/generated/kv8ConfigVersion.cmake DESTINATION ${package_dir})

# The .pc file finds its prefix from where it lies, so that `cmake --install --prefix` and DESTDIR
# need no second configuration.
file(RELATIVE_PATH KV8_PC_TO_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
foreach(library ${libraries})
  configure_file(cmake/${library}.pc.in generated/${library}.pc @ONLY)
  install(FILES ${kv8_BINARY_DIR}/generated/${library}.pc
    DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endforeach()
