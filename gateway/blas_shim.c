/* The two matrix products that MLX's CPU build asks its BLAS for, passed on to OpenBLAS, or done by blas_few_rows.c,
 * which stands before this text when it is compiled.
 *
 * The OpenBLAS inside numpy's wheel counts in 64-bit integers and has its own names, so that it can live beside any
 * other BLAS; MLX was linked against the common names with 32-bit integers. Preloaded, these definitions come before
 * the reference BLAS that MLX brings along. gateway/blas.py builds and checks this file; the enums of cblas.h are plain
 * ints to the ABI.
 */

#include <stdint.h>

enum { ROW_MAJOR = 101, AS_IT_IS = 111, TRANSPOSED = 112 };

void scipy_cblas_sgemm64_(int order, int transpose_a, int transpose_b, int64_t m, int64_t n, int64_t k, float alpha,
                          const float *a, int64_t lda, const float *b, int64_t ldb, float beta, float *c, int64_t ldc);
void scipy_cblas_dgemm64_(int order, int transpose_a, int transpose_b, int64_t m, int64_t n, int64_t k, double alpha,
                          const double *a, int64_t lda, const double *b, int64_t ldb, double beta, double *c,
                          int64_t ldc);
int scipy_openblas_get_num_threads64_(void);

void cblas_sgemm(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha, const float *a, int lda,
                 const float *b, int ldb, float beta, float *c, int ldc)
{
#ifdef HAS_FEW_ROWS
    if (order == ROW_MAJOR && transpose_a == AS_IT_IS && transpose_b == TRANSPOSED && alpha == 1 && beta == 0 &&
        few_rows_takes(m, n, k)) {
        few_rows_multiply((Product){m, n, k, a, b, c, lda, ldb, ldc}, scipy_openblas_get_num_threads64_());
        return;
    }
#endif
    scipy_cblas_sgemm64_(order, transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void cblas_dgemm(int order, int transpose_a, int transpose_b, int m, int n, int k, double alpha, const double *a,
                 int lda, const double *b, int ldb, double beta, double *c, int ldc)
{
    scipy_cblas_dgemm64_(order, transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
