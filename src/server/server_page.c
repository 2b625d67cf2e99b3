/* server_page.c - the page at /, one file that fetches nothing from anywhere else; its source is
 * page.html.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "server_page.h"

static char page[] = {
#include "page_bytes.inc"
};

void reply_with_page(exchange *x) {
    struct MHD_Response *const response =
        MHD_create_response_from_buffer(sizeof page, page, MHD_RESPMEM_PERSISTENT);
    if (response != NULL) {
        (void)MHD_add_response_header(response, "Content-Type", "text/html; charset=utf-8");
        (void)MHD_add_response_header(response, "Cache-Control", "no-cache");
        (void)MHD_add_response_header(
            response, "Content-Security-Policy",
            "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
            "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
            "frame-ancestors 'none'");
    }
    reply_with(x, 200, response);
}
