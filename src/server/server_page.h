/* server_page.h - the page at /, which lies in the program.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SERVER_PAGE_H
#define KV8_SERVER_PAGE_H

#include "server_state.h"

void reply_with_page(exchange *x);

#endif
