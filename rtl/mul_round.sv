// mul(a, b, n) = (a b + 2^(n - 1)) >> n of docs/algorithm.md: a signed product, shifted right and rounded half up.
// The caller's bounds say that the result fits OUT bits. SHIFT is from 1 to 63.
module mul_round #(
    parameter int SHIFT = 32,
    parameter int OUT = 32
) (
    input  logic signed [31:0] a,
    input  logic signed [31:0] b,
    output logic signed [OUT-1:0] y
);
    logic signed [63:0] wide;
    assign wide = a * b + (64'sd1 <<< (SHIFT - 1));
    assign y = OUT'(wide >>> SHIFT);
endmodule
